"""TBD."""


class RunFacts:
    pass


def diagnose(incident, facts):
    return ()
