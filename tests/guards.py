"""Guards that a test puts around a call."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Records every operator inside the block that returns storage none of its inputs has:
    (operator, bytes).

    Empty storage does not count: Triton's interpreter makes such tensors to hold views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            _storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, torch.Tensor)
                and leaf.untyped_storage().nbytes()
                and _storage(leaf) not in given
            ):
                self.seen.append((str(func), leaf.untyped_storage().nbytes()))
                given.add(_storage(leaf))
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
