"""The console command `rowmap`: censuses, row maps and reports as files, without Kubernetes.

`commands` read arguments and files and print; `work` are pure functions on what was loaded.
"""
