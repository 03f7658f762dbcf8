"""The old place of names of `omnistage.models.checkpoint.revision`, for one more version: import them from `omnistage.models.kit`."""

from omnistage.models.checkpoint.revision import compute_on_thread as compute_on_thread
from omnistage.models.checkpoint.revision import digests_of_files as digests_of_files
from omnistage.models.checkpoint.revision import revision as revision
