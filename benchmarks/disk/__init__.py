"""Disks that die, fail or forget, and the campaigns that try the store and its peers on them."""
