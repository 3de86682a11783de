"""What ``strategy/base.py`` is made of, and what strategies share: gradients, engines, replicas."""
