"""Model, losses and loops of the joint text and latent diffusion."""
