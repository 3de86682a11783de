"""Floor 3: models larger than the memory of a device: measured, placed, and brought in while they run.

measure.py sizes, place.py who goes where (a pure function), maps.py the public face of both; source.py where
the values of a weight lie, tensor.py what stands in for them; hooks.py and align.py what is called around a
forward; dispatch.py what is put where; block.py, pages.py and pager.py what brings weights to an accelerator;
crossing.py what moves between devices. In folders of their own: pipelines, and estimates.
"""
