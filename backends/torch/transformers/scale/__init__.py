"""Costs of a model on several devices, from its graph and its plans: memory and communication of each device.

Never here: the plans themselves (`engines`), loading, running.
"""
