"""Running user scripts: automatic guards of `stepguard run`, and replays of capsules."""
