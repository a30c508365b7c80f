"""Reports that people look at: text tables, HTML pages, notebook output, flame graphs."""
