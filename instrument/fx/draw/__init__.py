"""The picture of an FX graph: layout, SVG, HTML."""
