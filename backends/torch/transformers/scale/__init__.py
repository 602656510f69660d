"""Costs of a folder that several devices share, from its graph and its plans: what each holds and sends.

Never here: the plans themselves (`shell`), loading, running.
"""
