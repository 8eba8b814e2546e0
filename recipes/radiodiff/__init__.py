"""RadioDiff, small: conditional latent diffusion of radio maps."""
