"""Going back and going on: snapshots, checkpoints, rewinds, reruns."""
