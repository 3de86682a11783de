"""Parts of ``strategy/base.py``, and code that strategies share: gradients, engines, replicas."""
