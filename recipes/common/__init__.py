"""What the recipes share: the outcome of a mode, what is expected of it, the table and the plot."""
