"""Passes that fuse what one kernel of a decode step computes: rules from simple ops to those of `ir.ops.fused`."""
