"""Train the steps before an incident again, once for each thing that might have helped."""
