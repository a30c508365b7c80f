"""Reports for readers: text, JSON, Markdown, HTML pages, notebook output, flame graphs."""
