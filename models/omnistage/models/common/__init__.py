"""Parts that several families need. Modules that compute import torch; answer.py, thought.py and requests.py do not."""
