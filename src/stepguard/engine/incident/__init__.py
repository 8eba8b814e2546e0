"""From a bad reading to an incident that is understood and on record."""
