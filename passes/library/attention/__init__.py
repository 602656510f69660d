"""Passes that change the kind of attention: latent attention, windows, local and global layers."""
