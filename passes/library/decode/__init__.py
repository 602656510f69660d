"""Passes that fuse simple ops into ops of `ir.ops.fused`, each of which is one kernel of a decode step."""
