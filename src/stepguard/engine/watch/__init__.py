"""What a watched loop shows of itself, and how its update is vetoed."""
