"""latent_dlm: joint diffusion of text and a sentence latent; run its scripts from this folder."""
