"""Engines and servers of all makes, each in a process of its own that is stopped while another is measured."""
