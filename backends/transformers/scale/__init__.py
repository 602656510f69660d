"""Costs of a folder that several devices share, from its graph and its plans: what each device holds, what they send
each other. Nothing here writes plans (`shell`), loads weights or runs a model."""
