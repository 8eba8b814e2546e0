"""Plain numbers about the run for the diagnosing rules, which see no torch."""

from stepguard.diagnose import RunFacts


def run_facts(context, step):
    return RunFacts()
