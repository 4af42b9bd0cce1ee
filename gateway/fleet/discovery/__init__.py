"""Finding workers instead of listing them.

A *source* (``kubernetes.py``, ``dns.py``, ``file.py``) knows some engines at any time and says so, whole, whenever that
changes: ``found.py``. ``discovery.py`` keeps the registry equal to what all sources say together. Where a source does
not know an engine's KV events, the engine is asked before it joins: ``engine.py``.

Under the Kubernetes source lie ``kube_api.py`` (HTTP), ``kube_reflector.py`` (list and watch) and ``kube_objects.py``
(what a pod or a Service says of its engines).
"""
