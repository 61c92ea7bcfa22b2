"""WARC and WET files, such as Common Crawl's."""
