"""What Inductor has to know of our operators: that they are collectives.

Inductor emits its own collectives (torch.ops._c10d_functional) in the order of the graph.  An
operator that it does not know stays in place only as long as nothing is fused around it: a kernel
that joins work from before the head with work on a later all_reduce's result draws that all_reduce
in front of the head.  Ranks whose graphs are not the same one (static rows here, dynamic there)
would then meet in different orders, and wait for each other for ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def keep_order(*operators: torch._ops.OpOverload) -> None:
    """Have Inductor keep `operators` in order with its own collectives, if it is loaded.

    Inductor has no public way to say this.  Where the private one is not there, its own rule stays:
    the order of the graph, but for fusion.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is None or all(operator in lowering.lowerings for operator in operators):
        return
    try:
        from torch._inductor.ir import FallbackKernel, _CollectiveKernel
        from torch._inductor.virtualized import V

        tag = lowering.get_layout_constraint_tag
        constraint = lowering.tag_to_layout_constraint
    except (AttributeError, ImportError):
        return

    def as_collective(lower: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            before = len(V.graph.operations)
            result = lower(*args, **kwargs)
            for node in V.graph.operations[before:]:
                if type(node) is FallbackKernel:
                    # The same kernel call under the class whose instances the scheduler chains.
                    node.__class__ = _CollectiveKernel
            return result

        return collective

    for operator in operators:
        lowering.make_fallback(operator, constraint(tag(operator, with_default=True)), warn=False)
        lowering.lowerings[operator] = as_collective(lowering.lowerings[operator])
