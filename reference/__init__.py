"""The mathematics: for each kernel a plain ``model`` and the ``exact`` bits of each schedule.

Imports torch and the standard library only, and needs no GPU.
"""
