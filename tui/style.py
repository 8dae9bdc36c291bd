"""How the application is laid out: Textual CSS, kept in Python so that it is installed with the package."""

CSS = """
#headline { height: 1; background: $panel; }
#waiting { height: auto; padding: 1 2; }
#tabs { height: 1fr; }
TabPane { padding: 0; }
Pane { height: 1fr; padding: 0 1; }
Pane > .absent { padding: 1 1; height: auto; }
Pane > .content { height: 1fr; }
Static { height: auto; }
DataTable { height: 1fr; }
SearchTable { height: 1fr; }
SearchTable Input { dock: bottom; height: 1; }
MemoryChart { height: 3fr; min-height: 8; }
MemoryChart:focus { background-tint: $foreground 3%; }
#memory-alive { height: 2fr; min-height: 4; }
#overview-figures { padding: 0 1 1 1; }
#overview-scroll { height: 1fr; }
#overview-memory, #overview-time { width: 1fr; padding: 0 1; }
OverviewPane.wide #overview-scroll { layout: horizontal; }
#steps-summary, #modules-summary, #activations-summary, #communication-summary, #plan-summary { padding: 0 1; }
#communication-skew { padding: 0 1; }
CommunicationPane > .content { overflow-y: auto; }
CommunicationPane DataTable { height: auto; max-height: 50%; margin: 0 0 1 0; }
PlanPane > .content { overflow-y: auto; }
PlanPane DataTable { height: auto; max-height: 60%; margin: 1 0; }
#plan-lanes { padding: 0 1; }
#plan-lanes:focus { background-tint: $foreground 3%; }
#notes-text { padding: 0 1; }
HelpScreen { align: center middle; }
HelpScreen > VerticalScroll {
    width: 76; max-width: 100%; height: auto; max-height: 90%;
    border: round $primary; background: $surface; padding: 0 2;
}
"""
