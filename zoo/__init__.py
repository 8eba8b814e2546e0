"""The failure zoo: real incidents as tiny CPU runs with their right answers, and controls."""
