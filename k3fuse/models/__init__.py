"""Stock forwards of the models in plain torch; nothing here knows of the compiler."""
