"""Pipelines that several tests begin with."""

from __future__ import annotations

FOLD = "fold-norm-scale{untie=true}"
