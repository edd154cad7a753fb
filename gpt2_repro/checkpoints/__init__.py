"""Save, seal, rotate, choose, restore and copy the folders of a run."""
