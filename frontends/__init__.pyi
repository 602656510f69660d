from .app.api.source.sources import load_source as load_source
from .model import Model as Model
from .models.presets import PRESETS as PRESETS
