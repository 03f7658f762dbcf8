"""Parts that several families need. Modules that compute import torch; answer.py, steps.py and requests.py do not."""
