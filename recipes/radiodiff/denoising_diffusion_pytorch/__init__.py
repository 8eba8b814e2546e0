"""Autoencoder, conditional UNet, decoupled diffusion and city maps."""
