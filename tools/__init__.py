"""The command line ``goldens`` and its reports."""
