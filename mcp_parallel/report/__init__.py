"""``mcp-parallel report``: run folders become one page that needs nothing but a browser.

series.py   a JSONL file of any length as columns of bounded size
runs.py     a run folder as plain values
facts.py    what follows from its configuration: layout, memory, pipeline
fields.py   the names, units and charts of the fields that are known
summary.py  the figures that stand for a whole run
render.py   all of it and the files of ``page/`` as HTML
"""
