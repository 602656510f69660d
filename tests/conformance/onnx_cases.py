"""The node tests of the onnx package, of chosen operators."""

from __future__ import annotations

import importlib
import pkgutil
import warnings

from onnx.backend.test.case import node
from onnx.backend.test.case.test_case import TestCase


def node_cases(*operators: str) -> list[TestCase]:
    """Return the cases of `operators`.

    onnx computes the cases of a module where it is imported. Its own `collect_testcases` imports them all, and spends
    ten seconds on pooling alone.
    """
    files = {name.lower() for name in operators}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some cases overflow on purpose
        for module in pkgutil.iter_modules(node.__path__):
            if module.name.replace("_", "") in files:
                importlib.import_module(f"{node.__name__}.{module.name}")
    return [case for case in node._NodeTestCases if case.model and _operators(case) <= {*operators}]


def _operators(case: TestCase) -> set[str]:
    assert case.model is not None
    return {n.op_type for n in case.model.graph.node}
