"""Verify checkpoints of any format without executing anything that is in them.

The package is not called `verify` because `stepguard.verify` is the public function; a package of
that name would hide it.
"""

from stepguard.verification.bounded_file import Damaged
from stepguard.verification.file_formats import is_checkpoint_file, read_content
from stepguard.verification.path_check import (
    Plan,
    check_checkpoint,
    check_path,
    nothing_in,
    seal_folder,
    verify,
    verify_or_empty,
    with_lr,
)
from stepguard.verification.pickle_globals import PickledObject, TensorRecord

__all__ = [
    "Damaged",
    "PickledObject",
    "Plan",
    "TensorRecord",
    "check_checkpoint",
    "check_path",
    "is_checkpoint_file",
    "nothing_in",
    "read_content",
    "seal_folder",
    "verify",
    "verify_or_empty",
    "with_lr",
]
