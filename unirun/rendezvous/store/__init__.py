"""The store: a small, ordered key-value service in which a job survives its master, and in which nodes meet.

::

    protocol.py     what a store and a watch do; written against by all others
    memory.py       in this process, with a clock that can be turned by hand
    sqlite.py       in a file, for one host; _database.py has what is said of the file
    etcd.py         in etcd, for many hosts; _etcd_cluster.py finds a member that answers, _etcd_watch.py stays with it
    address.py      where a store is, as text
    url.py          from that text to the store

``tests/contract/store`` holds all of them to the protocol.
"""
