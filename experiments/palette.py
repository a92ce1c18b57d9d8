"""The colours of every figure, on a light and on a dark page. A figure is drawn in those of the light one."""

# {colour on a light page: (its name in the report's page, on a dark page)}
THEME = {
    "#1c2126": ("--ink", "#e4e7ea"),
    "#626b73": ("--muted", "#9aa4ad"),
    "#e3e6e9": ("--grid", "#343b42"),
    "#0b6e99": ("--s1", "#4fb0db"),
    "#b5372b": ("--s2", "#ee7f72"),
    "#3a7d44": ("--s3", "#72bf7d"),
    "#7b4fa3": ("--s4", "#b993dd"),
    "#a8800f": ("--s5", "#dcb94a"),
    "#7d7d7d": ("--s6", "#a9a9a9"),
    "#8a6d5b": ("--s7", "#bfa08c"),
}
INK, MUTED, GRID, *SERIES = THEME
VARIANTS = {"mamba_ssm": "#7d7d7d", "fla": "#a8800f", "baseline": "#0b6e99", "fused": "#b5372b", "persistent": "#3a7d44",
            "auto": "#7b4fa3", "torch": "#8a6d5b"}
_LIGHT, _DARK = "#ffffff", "#0d1117"  # pages; the dark one is GitHub's


def make_style() -> dict[str, str]:
    """matplotlib's parameters: the page's ink, and text that stays text."""
    return {"svg.hashsalt": "ssd", "svg.fonttype": "none", "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED,
            "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "grid.color": GRID}


def follow_reader(svg: str) -> str:
    """The SVG of a transparent figure with rules by which it is dark for a reader who prefers dark pages.

    It fills its own background: a page that is light for such a reader shows it as a dark box, and it can be read there too.
    """
    rules = [f"svg {{ background: {_DARK} }}"]
    for light, (_, dark) in THEME.items():
        rules += [
            f'[style*="{part}: {light}"], [{part}="{light}"] {{ {part}: {dark} !important }}'
            for part in ("fill", "stroke")]
    style = f"svg {{ background: {_LIGHT} }}\n@media (prefers-color-scheme: dark) {{\n" + "\n".join(rules) + "\n}"
    return svg.replace('<style type="text/css">', f'<style type="text/css">{style}\n', 1)
