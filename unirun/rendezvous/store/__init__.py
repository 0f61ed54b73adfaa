"""The store: a small, ordered key-value service that holds a job's durable state and in which nodes meet.

::

    protocol.py     the protocols of a store and a watch, on which callers depend; addresses of stores
    memory.py       in this process, with a clock that tests can set
    sqlite.py       in a file, for one host
    etcd.py         in etcd, for many hosts; _etcd_cluster.py selects a member and speaks to it
    url.py          opens the store at a URL

``tests/contract/store`` runs one suite against all of them.
"""
