"""What runs in a candidate's process; tools.worker starts it.

The process holds nothing of ``reference`` and of ``goldens`` but ``goldens.call``: see ``guard``.
"""
