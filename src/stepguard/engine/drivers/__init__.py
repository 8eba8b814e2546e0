"""Who calls forward, backward and update: `guard.step`, a watched loop, closures, fused ones."""
