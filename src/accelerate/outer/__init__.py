"""Local training: LocalSGD and DiLoCo, where ranks step alone and average their weights now and then."""
