"""The live page: a process of its own that tails journals and never touches training.

`folders.py` finds the runs below a folder and opens no other, `follower.py` tails one run for all
pages that show it, `app.py` is the web application, `server.py` binds it.
"""
