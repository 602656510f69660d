"""Passes that fuse simple ops into those of `ir.ops.fused`, each of which is one kernel of a decode step."""
