"""The flow of one step: begin, read, agree, judge, veto, locate, diagnose, decide, apply, record."""
