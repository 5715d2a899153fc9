"""How is one tensor reduced inside a graph?"""
