"""The store: a small, ordered key-value service that holds a job's durable state and in which nodes meet.

::

    protocol.py     the protocols of a store and a watch; callers depend on these only
    memory.py       in this process, with a clock that tests can set
    sqlite.py       in a file, for one host
    etcd.py         in etcd, for many hosts; _etcd_cluster.py selects a member and speaks to it
    address.py      parses a store's URL
    url.py          opens the store at a URL

``tests/contract/store`` runs one suite against all of them.
"""
