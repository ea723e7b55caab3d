"""Linear attention over devices: function.py is the public function, device.py what each device does."""
